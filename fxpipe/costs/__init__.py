"""What nodes and optimizers cost, measured or computed for a device, and where that is kept."""
