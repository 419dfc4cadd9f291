"""Which data type each part of training is kept in."""
