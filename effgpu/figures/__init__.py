"""Results as pictures: the only room that imports matplotlib. `plot.py` says what is drawn of what."""
