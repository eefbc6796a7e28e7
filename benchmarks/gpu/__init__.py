"""What is measured on a GPU, and what can be known of its kernels without one."""
