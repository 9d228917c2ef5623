"""Workers that are replaced when they die or hang, wherever their processes run."""
