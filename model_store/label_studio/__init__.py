"""Write tasks for Label Studio, and read its label configs and annotations."""
