"""What watches the training steps: faults, bad losses, replay, stragglers, profiles, the wandb mirror."""
