"""What all pages share: one HTML file that needs no network, its looks, its figures as files."""
