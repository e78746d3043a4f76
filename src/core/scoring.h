// Scores that stand for what competes over an element.
