/* CUDA's headers, which come with PyTorch, include this one of nvcc's, which does not: its marks, as a C compiler needs
 * them. */
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __host__
#define __device__
#define CUDARTAPI
