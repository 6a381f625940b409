"""How the sides of a comparison are installed, started, asked and watched."""
