"""Elasticity: measures what subscribers notice while real layers scale and recover, and the rate of more slices."""
