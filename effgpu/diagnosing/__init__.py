"""What holds a training step back: seen in one step, replayed with one thing changed, ranked by what it would save."""
