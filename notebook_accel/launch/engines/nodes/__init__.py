"""How the nodes of a run meet, and what they tell each other."""
