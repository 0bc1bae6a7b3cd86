"""Measuring one step: the device, the clock, the memory, the power, and variants that take turns."""
