"""Predicting a step for a GPU that is not there: a walk on fake tensors, and what it says of memory and time."""
