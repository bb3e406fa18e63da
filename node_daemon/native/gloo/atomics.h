// Atomic access to plain fields: the frame's layout is a C struct that other processes read, so std::atomic members
// are out of the question.
#pragma once

#include <stdint.h>

namespace tocsin {

template <class T>
inline T load(const T& field) {
  return __atomic_load_n(&field, __ATOMIC_RELAXED);
}

template <class T>
inline T load_acquire(const T& field) {
  return __atomic_load_n(&field, __ATOMIC_ACQUIRE);
}

template <class T, class V>
inline void store(T& field, V value) {
  __atomic_store_n(&field, static_cast<T>(value), __ATOMIC_RELAXED);
}

// Not before anything that this thread stored earlier.
template <class T, class V>
inline void store_release(T& field, V value) {
  __atomic_store_n(&field, static_cast<T>(value), __ATOMIC_RELEASE);
}

template <class T, class V>
inline T add(T& field, V amount) {
  return __atomic_fetch_add(&field, static_cast<T>(amount), __ATOMIC_RELAXED);
}

template <class T, class V>
inline T add_release(T& field, V amount) {
  return __atomic_fetch_add(&field, static_cast<T>(amount), __ATOMIC_ACQ_REL);
}

template <class T>
inline bool swap_if(T& field, T expected, T desired) {
  return __atomic_compare_exchange_n(&field, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

}  // namespace tocsin
