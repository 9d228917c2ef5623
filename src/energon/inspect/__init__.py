"""Tools that examine datasets without changing them: what fails, and what is where."""
