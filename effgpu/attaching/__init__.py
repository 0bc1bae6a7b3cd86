"""Training scripts as they are: how a command starts, where its steps begin and end, and a plan that counts them."""
