"""What turns gradients into new weights: learning rate schedules, the loss scale, and update rules over flat shards."""
