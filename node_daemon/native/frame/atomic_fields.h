// Atomic access to plain fields, for C: the frame's layout is a struct that other processes read.
#pragma once

#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define LOAD_ACQUIRE(field) __atomic_load_n(&(field), __ATOMIC_ACQUIRE)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)
#define STORE_RELEASE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELEASE)  // after all stores before it
#define ADD(field, amount) __atomic_fetch_add(&(field), (amount), __ATOMIC_RELAXED)
#define SWAP_IF(field, expected, desired)                                                                      \
  ({                                                                                                           \
    __typeof__(field) expected_ = (expected);                                                                  \
    __atomic_compare_exchange_n(&(field), &expected_, (desired), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);        \
  })
