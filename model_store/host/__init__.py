"""Know the machine: its cores, the last words of child processes, and files for this user alone."""
