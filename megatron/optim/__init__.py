"""What turns gradients into new weights: schedule, loss scale, norm and Adam, each a small unit."""
