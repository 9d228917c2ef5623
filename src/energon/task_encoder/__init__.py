"""task_encoder"""
