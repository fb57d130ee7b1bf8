"""The user's file and its batches."""
