"""Hooks of users: how they are called, seeded and timed, and what happens when one fails."""
