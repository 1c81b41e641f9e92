extern "C" __global__ void __launch_bounds__(256) k0_kernel(float* __restrict__ in0_ptr, float* __restrict__ out0_ptr, int n0, int n1, int n2);
extern "C" __global__ void __launch_bounds__(256) k0_kernel_1(float* __restrict__ in0_ptr, float* __restrict__ out0_ptr, int n0, int n1, int n2);
extern "C" __global__ void __launch_bounds__(256) k0_kernel(float* __restrict__ in0_ptr, float* __restrict__ out0_ptr, int n0, int n1, int n2) {
  int column1 = ((((int)blockIdx.x) * 256) + min(((int)threadIdx.x), (((n1 * 5) - (((int)blockIdx.x) * 256)) - 1)));
  int position2 = (column1 % 5);
  int first3 = (((column1 / 5) * n0) + position2);
  alignas(64) float acc_ptr[1];
  acc_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  for (int turn = 0; turn < (n2 - ((int)threadIdx.y)); ++turn) {
    int part1 = (turn + ((int)threadIdx.y));
    alignas(64) float v2_ptr[1];
    v2_ptr[0] = in0_ptr[(first3 + (part1 * 5))];
    acc_ptr[0] = (acc_ptr[0] + v2_ptr[0]);
  }
  if (((int)threadIdx.x) < ((n1 * 5) - (((int)blockIdx.x) * 256))) {
    out0_ptr[column1] = acc_ptr[0];
  }
}

extern "C" __global__ void __launch_bounds__(256) k0_kernel_1(float* __restrict__ in0_ptr, float* __restrict__ out0_ptr, int n0, int n1, int n2) {
  __shared__ alignas(64) float shared0_ptr[256];
  int column1 = ((((int)blockIdx.x) * 32) + min(((int)threadIdx.x), (((n1 * 5) - (((int)blockIdx.x) * 32)) - 1)));
  int position2 = (column1 % 5);
  int first3 = (((column1 / 5) * n0) + position2);
  alignas(64) float acc_ptr[1];
  acc_ptr[0] = 0x0p+0f/*0.000000e+00*/;
  for (int turn = 0; turn < (((n2 - ((int)threadIdx.y)) + 7) / 8); ++turn) {
    int part1 = ((turn * 8) + ((int)threadIdx.y));
    alignas(64) float v2_ptr[1];
    v2_ptr[0] = in0_ptr[(first3 + (part1 * 5))];
    acc_ptr[0] = (acc_ptr[0] + v2_ptr[0]);
  }
  __syncthreads();
  shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] = acc_ptr[0];
  __syncthreads();
  if (((int)threadIdx.y) < 4) {
    shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] = (shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] + shared0_ptr[(((((int)threadIdx.y) + 4) * 32) + ((int)threadIdx.x))]);
  }
  __syncthreads();
  if (((int)threadIdx.y) < 2) {
    shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] = (shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] + shared0_ptr[(((((int)threadIdx.y) + 2) * 32) + ((int)threadIdx.x))]);
  }
  __syncthreads();
  if (((int)threadIdx.y) < 1) {
    shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] = (shared0_ptr[((((int)threadIdx.y) * 32) + ((int)threadIdx.x))] + shared0_ptr[(((((int)threadIdx.y) + 1) * 32) + ((int)threadIdx.x))]);
  }
  __syncthreads();
  if ((((int)threadIdx.y) == 0) && (((int)threadIdx.x) < ((n1 * 5) - (((int)blockIdx.x) * 32)))) {
    out0_ptr[column1] = shared0_ptr[((int)threadIdx.x)];
  }
}
