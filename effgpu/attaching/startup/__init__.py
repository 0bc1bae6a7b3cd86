"""A folder that `effgpu bench` puts on PYTHONPATH, for what Python runs at its start: `sitecustomize`."""
