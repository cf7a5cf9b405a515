"""Interfaces of other systems for their scripts, on the public names of minialpa. No other part imports them."""
