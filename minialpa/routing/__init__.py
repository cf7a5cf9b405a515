"""Rows that an argsort of expert ids orders, in blocks that devices share."""
