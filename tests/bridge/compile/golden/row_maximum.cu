extern "C" __global__ void __launch_bounds__(128) k0_kernel(float* __restrict__ in0_ptr, float* __restrict__ out0_ptr, int n0);
extern "C" __global__ void __launch_bounds__(128) k0_kernel(float* __restrict__ in0_ptr, float* __restrict__ out0_ptr, int n0) {
  int row1 = ((((int)blockIdx.x) * 64) + min(((int)threadIdx.y), ((n0 - (((int)blockIdx.x) * 64)) - 1)));
  alignas(64) float acc_ptr[4];
  acc_ptr[0] = -CUDART_INF_F;
  acc_ptr[1] = -CUDART_INF_F;
  acc_ptr[2] = -CUDART_INF_F;
  acc_ptr[3] = -CUDART_INF_F;
  int base2 = (row1 * 8);
  #pragma unroll
  for (int turn = 0; turn < 1; ++turn) {
    int position1 = (((turn * 2) + ((int)threadIdx.x)) * 4);
    int at1 = (base2 + position1);
    int whole2 = (at1 >> 2);
    alignas(64) float x_ptr[4];
    *(float4*)(x_ptr + 0) = *(float4*)(in0_ptr + (whole2 * 4));
    #pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      acc_ptr[lane] = bridge_max(acc_ptr[lane], x_ptr[lane]);
    }
  }
  alignas(64) float v3_ptr[1];
  v3_ptr[0] = bridge_max(acc_ptr[0], acc_ptr[2]);
  alignas(64) float v4_ptr[1];
  v4_ptr[0] = bridge_max(acc_ptr[1], acc_ptr[3]);
  alignas(64) float v5_ptr[1];
  v5_ptr[0] = bridge_max(v3_ptr[0], v4_ptr[0]);
  alignas(64) float v6_ptr[1];
  v6_ptr[0] = bridge_shuffle_xor(v5_ptr[0], 1);
  alignas(64) float v7_ptr[1];
  v7_ptr[0] = bridge_max(v5_ptr[0], v6_ptr[0]);
  #pragma unroll
  for (int turn_1 = 0; turn_1 < 1; ++turn_1) {
    int position1_1 = (((turn_1 * 2) + ((int)threadIdx.x)) * 4);
    int at1_1 = (base2 + position1_1);
    int whole2_1 = (at1_1 >> 2);
    alignas(64) float x_ptr_1[4];
    *(float4*)(x_ptr_1 + 0) = *(float4*)(in0_ptr + (whole2_1 * 4));
    alignas(64) float y_ptr[4];
    int at3 = ((row1 * 8) + position1_1);
    int whole4 = (at3 >> 2);
    #pragma unroll
    for (int lane_1 = 0; lane_1 < 4; ++lane_1) {
      alignas(64) float v1_ptr[1];
      v1_ptr[0] = (x_ptr_1[lane_1] - v7_ptr[0]);
      y_ptr[lane_1] = v1_ptr[0];
    }
    if (((int)threadIdx.y) < (n0 - (((int)blockIdx.x) * 64))) {
      *(float4*)(out0_ptr + (whole4 * 4)) = *(float4*)(y_ptr + 0);
    }
  }
}
