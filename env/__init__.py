"""The problem: what can be decided, and what a decision is worth."""
