"""`orchestra checkpoint ls | verify | export | import`, one file each."""
