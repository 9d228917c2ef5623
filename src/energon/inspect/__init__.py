"""What tools find out about datasets, which they leave as they are: what fails, what is where."""
