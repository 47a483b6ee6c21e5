"""A report in every form that somebody reads it in: a module for each."""
