"""What a job costs and when it may start, and runs that begin when others are done."""
