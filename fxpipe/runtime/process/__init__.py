"""The processes of a run: started, run to their end, summed up."""
