"""Scripts that measure. They print a table; they are no tests, and nothing fails by them."""
