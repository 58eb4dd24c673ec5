"""Covered calls: one file an operator, and what hands them over."""
