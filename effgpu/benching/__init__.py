"""`effgpu bench`: training scripts, each in a process of its own, which take turns."""
