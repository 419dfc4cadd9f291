"""What is asked of a run that trains, through files of its folder `control`: to stop, to trace its steps."""
