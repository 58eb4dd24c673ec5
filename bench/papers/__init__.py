"""The papers' tables: every figure that the texts give beside what the planner says for the same network and card."""
