"""Released policies, their cards, and the route tables they were trained on."""
