"""What the suite is tried on: a sound agent, and mutants of it with one bug each."""
