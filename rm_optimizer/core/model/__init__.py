"""The Bradley-Terry reward model, its losses, and its weights over several devices."""
