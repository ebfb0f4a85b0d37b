"""Launchers of a run on several nodes: how they find each other, and what they tell each other. See docs/launch.md."""
