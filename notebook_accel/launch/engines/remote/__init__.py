"""Ranks on other machines: what holds the process of a rank there and passes its events on; Ray and ssh use it."""
