"""What uses the core as the kernel's drivers do."""
