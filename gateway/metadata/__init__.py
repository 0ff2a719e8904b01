"""What is known of objects without their bytes."""
