"""Who decides: everything that asks for routes and is told outcomes."""
