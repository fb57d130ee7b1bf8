"""How a build and a run look in a terminal: 80 columns are enough, more are used, colours only where they show."""
