"""An analysis to look at: one HTML page that needs no network, figures as files, the terminal."""
