"""Learn from the labels of the inbox, by hand or as a job, and exchange them with Label Studio."""
