"""What there is to predict: a model on its layout, a device, networks, a trainer; and where each is found."""
