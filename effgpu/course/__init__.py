"""The course: its data, its running example, and the commands that run the lessons and report what they measured."""
