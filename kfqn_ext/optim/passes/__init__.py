"""The one or two forward-backward passes over a minibatch, and what is measured in them."""
