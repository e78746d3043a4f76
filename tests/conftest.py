"""What all tests share; its presence also lets them `import helpers`."""

from hypothesis import settings

# Timing is asserted where it matters; elsewhere a busy machine must not fail a test.
settings.register_profile("dare", deadline=None, max_examples=60)
settings.load_profile("dare")
